#!/usr/bin/env python3
"""examples/gpt.c, and once examples/llm, over TCP on two hosts, alpha and beta: network namespaces
with a link between them, which this test makes (it needs root and ip). With a key the losses are
those of threads, bit for bit; without one, with another, through a firewall or at a wrong address
each host says one sentence. Reports in cmocka's words. build/gpt and build/tshard-run are made
where they are missing.
"""

import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time

TOP = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(TOP, "tests", "support"))
from scripts import LAUNCHER, NO_LAUNCHER, Skipped, check, has_launcher, run_tests, tell
LLM = os.path.join(TOP, "build", "llm")
GPT = os.path.join(TOP, "build", "gpt")
MODEL = "--layers 1 --heads 4 --width 32 --context 16 --batch 4 --eval-every 100 --sample 0".split()
ALPHA, BETA, ELSEWHERE = "10.77.0.1", "10.77.0.2", "10.78.0.1"
PORT = "29400"  # tshard-run's default
HOSTS = ["--hosts", "alpha:2,beta:2"]
KEY = {"TSHARD_KEY": "a key that both hosts have"}
LIMIT = 60  # seconds of one program
SLACK = 5  # seconds that a busy machine may add


# ---- hosts -------------------------------------------------------------------


def ip(*words):
    subprocess.run(("ip",) + words, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                   stderr=subprocess.PIPE, timeout=LIMIT)


def left_behind():
    """Namespaces of runs of this test that were killed."""
    listed = subprocess.run(("ip", "netns", "list"), stdout=subprocess.PIPE, timeout=LIMIT)
    for match in re.finditer(r"^tshard-(\d+)-\S+", listed.stdout.decode(), re.M):
        if not os.path.exists("/proc/" + match[1]):
            yield match[0]


class Hosts:
    """Two hosts, which end with the block."""
    numbers = itertools.count()

    def __init__(self, folder):
        number = next(self.numbers)
        self.folder = folder
        self.spaces = {host: "tshard-%d-%d%s" % (os.getpid(), number, host[0])
                       for host in ("alpha", "beta")}
        self.programs = []
        self.names("alpha", alpha=ALPHA, beta=BETA)
        self.names("beta", alpha=ALPHA, beta=BETA)

    def __enter__(self):
        try:
            for space in self.spaces.values():
                ip("netns", "add", space)
            ip("link", "add", "veth0", "netns", self.spaces["alpha"], "type", "veth",
               "peer", "name", "veth0", "netns", self.spaces["beta"])
            for host, address in (("alpha", ALPHA), ("beta", BETA)):
                self.ip(host, "address", "add", address + "/24", "dev", "veth0")
                self.ip(host, "link", "set", "veth0", "up")
                self.ip(host, "link", "set", "lo", "up")
        except Exception:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        for program in self.programs:
            if program.poll() is None:
                program.kill()
            program.wait()
            for file in (program.stdout, program.stderr):
                file.close()
        for space in self.spaces.values():
            subprocess.run(("ip", "netns", "delete", space), stderr=subprocess.DEVNULL)

    def ip(self, host, *words):
        ip("-n", self.spaces[host], *words)

    def block(self, host, ports):
        """A firewall that swallows what comes to these ports (strictly: what they answer)."""
        self.ip(host, "rule", "add", "ipproto", "6", "sport", ports, "blackhole")  # 6: TCP

    def names(self, host, **addresses):
        """What /etc/hosts says there."""
        with open(os.path.join(self.folder, host), "w") as file:
            file.write("127.0.0.1 localhost\n")
            file.writelines("%s %s\n" % (at, name) for name, at in addresses.items())

    def start(self, host, *words, env=None):
        """A program on a host. What an outer launch may have set is not there."""
        kept = {name: value for name, value in os.environ.items()
                if not re.match("TSHARD_|SLURM_|MASTER_|RANK$|WORLD_SIZE$", name)}
        with_names = ["sh", "-c", 'mount --bind "$0" /etc/hosts && exec "$@"',
                      os.path.join(self.folder, host)]
        program = subprocess.Popen(
            ["ip", "netns", "exec", self.spaces[host]] + with_names + list(words), cwd=TOP,
            env=dict(kept, **(env or {})), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE)
        self.programs.append(program)
        return program

    def gpt(self, host, env, steps=6):
        """One rank without a launcher."""
        return self.start(host, GPT, "--backend", "tcp", *train(self.folder, steps), env=env)

    def run(self, host, *words, env=None, steps=6):
        """The ranks of a host."""
        node = "0" if host == "alpha" else "1"
        return self.start(host, LAUNCHER, *(words or HOSTS), "--node-rank", node, GPT, "--backend",
                          "tcp", *train(self.folder, steps), env=env)


def train(folder, steps):
    return MODEL + ["--steps", str(steps), "--out", os.path.join(folder, "tcp")]


def end(program):
    """Exit code, stdout, stderr."""
    out, err = program.communicate(timeout=LIMIT)
    return program.returncode, out.decode(), err.decode()


def losses(folder):
    """Of every step: losses, rate and norm, not the time that they took."""
    with open(os.path.join(folder, "metrics.csv")) as file:
        return [line.split(",")[:5] for line in file]


def of_threads(folder, ranks):
    folder = os.path.join(folder, "threads")
    code = subprocess.call([GPT, "--ranks", str(ranks), *MODEL, "--steps", "6", "--out", folder],
                           cwd=TOP, stdout=subprocess.DEVNULL, timeout=LIMIT)
    check(code == 0, "threads:", code)
    return losses(folder)


def check_same(folder, ranks, *programs):
    for program in programs:
        code, _, err = end(program)
        check(code == 0, code, err)
    found, expected = losses(os.path.join(folder, "tcp")), of_threads(folder, ranks)
    check(len(found) == 7 and found == expected, found, expected)


def check_says(program, *sentences, code=2):
    """It ends with this code, in sentences of which each of these holds a part."""
    got, _, err = end(program)
    check(got == code, got, err)
    for sentence in sentences:
        check(sentence in err, "no", repr(sentence), "in", err)


# ---- with a key --------------------------------------------------------------


def two_hosts_train_as_threads_do(folder):
    with Hosts(folder) as hosts:
        check_same(folder, 4, hosts.run("beta", env=KEY), hosts.run("alpha", env=KEY))


def a_language_model_runs_on_two_hosts(folder):
    """examples/llm/README.md's lines; this model has the licence by heart."""
    if not os.path.exists(LLM):
        raise Skipped("there is no build/llm")
    with open(os.path.join(TOP, "LICENSE"), "rb") as file:
        text = file.read()
    text = text[text.index(b"Permission"):][:60]
    words = [LLM, "--backend", "tcp", "--model", "examples/llm/tiny/llama", "--ids",
             " ".join(map(str, text[:20])), "--print-ids", "--max-new", "40"]
    with Hosts(folder) as hosts:
        beta, alpha = (hosts.start(host, LAUNCHER, *HOSTS, "--node-rank", node, *words, env=KEY)
                       for host, node in (("beta", "1"), ("alpha", "0")))
        code, out, err = end(alpha)
        check(code == 0 and out.split() == ["[0]", *map(str, text[20:])], code, out, err)
        code, out, err = end(beta)
        check(code == 0 and not out, code, out, err)


def a_key_file_and_a_host_file(folder):
    key, names = os.path.join(folder, "key"), os.path.join(folder, "hosts")
    subprocess.run((LAUNCHER, "--new-key", key), check=True, stdout=subprocess.DEVNULL,
                   timeout=LIMIT)
    with open(names, "w") as file:
        file.write("alpha slots=1\nbeta slots=3\n")
    env = {"TSHARD_KEY_FILE": key}
    with Hosts(folder) as hosts:
        words = ["--hostfile", names, "--port", "31000"]
        check_same(folder, 4, hosts.run("beta", *words, env=env),
                   hosts.run("alpha", *words, env=env))


def without_a_launcher(folder):
    """By tshard's own variables, torchrun's and Slurm's."""
    own = {"TSHARD_HOST": "alpha", "TSHARD_PORT": PORT, "TSHARD_SIZE": "2"}
    torchrun = {"MASTER_ADDR": "alpha", "MASTER_PORT": "29500", "WORLD_SIZE": "2"}
    agent = dict(torchrun, TORCHELASTIC_USE_AGENT_STORE="True")
    slurm = {"SLURM_NTASKS": "2", "SLURM_STEP_NODELIST": "alpha,beta", "SLURM_JOB_ID": "4711"}
    with Hosts(folder) as hosts:
        for env, rank in ((own, "TSHARD_RANK"), (torchrun, "RANK"), (agent, "RANK"),
                          (slurm, "SLURM_PROCID")):
            ranks = [hosts.gpt(host, dict(KEY, **env, **{rank: number}))
                     for number, host in (("1", "beta"), ("0", "alpha"))]
            check_same(folder, 2, *ranks)
            os.remove(os.path.join(folder, "tcp", "metrics.csv"))


def with_few_ports_open(folder):
    """Ranks listen on ports that the system picks from a range, which may be narrow."""
    with Hosts(folder) as hosts:
        for host in hosts.spaces:
            set_range = 'echo "40000 40099" >/proc/sys/net/ipv4/ip_local_port_range'
            code, _, err = end(hosts.start(host, "sh", "-c", set_range))
            check(code == 0, err)
            for ports in ("1-29399", "29401-39999", "40100-65534"):
                hosts.block(host, ports)
        check_same(folder, 4, hosts.run("beta", env=KEY), hosts.run("alpha", env=KEY))


def a_rank_that_dies_ends_both_hosts(folder):
    with Hosts(folder) as hosts:
        alpha, beta = (hosts.run(host, env=KEY, steps=1000000) for host in ("alpha", "beta"))
        line = b" "
        while line and b"step " not in line:  # a line that ends with "\r" is a step's
            line = alpha.stdout.read(16)
        with open("/proc/%d/task/%d/children" % (beta.pid, beta.pid)) as file:
            pids = [int(pid) for pid in file.read().split()]
        victims = [pid for pid in pids if b"TSHARD_RANK=3\0" in environ(pid)]
        check(len(victims) == 1, "ranks of beta:", pids)
        begin = time.monotonic()
        os.kill(victims[0], signal.SIGKILL)
        codes = {"alpha": end(alpha), "beta": end(beta)}
        check(time.monotonic() - begin < 4 + SLACK, time.monotonic() - begin)
        code, _, err = codes["alpha"]
        check(code == 1 and re.search(r"\[0\] tshard: rank 0 stops: rank 3 at 10\.77\.0\.2:\d+ (is "
                                      r"gone: its|lost its|closed its) connection", err), code, err)
        code, _, err = codes["beta"]
        check(code == 137 and "rank 3 failed first: killed by signal 9" in err, code, err)


def environ(pid):
    try:
        with open("/proc/%d/environ" % pid, "rb") as file:
            return file.read()
    except OSError:
        return b""


# ---- what goes wrong ---------------------------------------------------------


def without_a_key(folder):
    env = {"TSHARD_HOST": "alpha", "TSHARD_PORT": PORT, "TSHARD_SIZE": "2"}
    with Hosts(folder) as hosts:
        for host in hosts.spaces:
            check_says(hosts.run(host), "ranks on several hosts need a key: set TSHARD_KEY or "
                       "TSHARD_KEY_FILE to the same on each")
        for rank, host in enumerate(hosts.spaces):
            check_says(hosts.gpt(host, dict(env, TSHARD_RANK=str(rank))),
                       "10.77.0.1 is not a loopback address: set TSHARD_KEY or TSHARD_KEY_FILE")
        env = {"TSHARD_INSECURE": "1"}
        check_same(folder, 4, hosts.run("beta", env=env), hosts.run("alpha", env=env))


def with_different_keys(folder):
    env = {"TSHARD_TIMEOUT": "2"}
    with Hosts(folder) as hosts:
        alpha = hosts.run("alpha", env=dict(env, TSHARD_KEY="one key of 24 letters it is"))
        beta = hosts.run("beta", env=dict(env, TSHARD_KEY="another key of 24 letters"))
        check_says(beta, "did not reach rank 0 in 2.0 s: 10.77.0.1:29400, where rank 0 was "
                   "expected, refuses without a proof that it has the key: the two do not have the "
                   "same key (TSHARD_KEY or TSHARD_KEY_FILE)", "tshard: rank 2 tries again: ")
        check_says(alpha, "it has another key", "[0] tshard: rank 0 refused 10.77.0.2:",
                   "did not form in 2.0 s; absent ranks: 2 3")


def with_a_blocked_port(folder):
    env = dict(KEY, TSHARD_TIMEOUT="3")
    with Hosts(folder) as hosts:
        hosts.block("alpha", PORT)
        alpha, beta = hosts.run("alpha", env=env), hosts.run("beta", env=env)
        check_says(alpha, "did not form in 3.0 s; absent ranks: 2 3")
        check_says(beta, "did not reach rank 0 in 3.0 s: 10.77.0.1:29400 does not answer; rank 0 "
                   "has not started, does not listen at alpha:29400 (TSHARD_HOST, TSHARD_PORT), or "
                   "its world is complete already")


def with_only_the_port_of_rank_0_open(folder):
    env = dict(KEY, TSHARD_TIMEOUT="4")
    with Hosts(folder) as hosts:
        hosts.block("alpha", "29401-65534")
        alpha, beta = hosts.run("alpha", env=env), hosts.run("beta", env=env)
        for host in (alpha, beta):  # as the first rank says whose time is up
            got, _, err = end(host)
            check(got == 2 and re.search(
                r"did not form in 4\.0 s; (10\.77\.0\.1:\d+ does not answer|"
                r"a firewall between hosts\? Still connecting: [123])", err), got, err)


def at_a_wrong_address(folder):
    env = dict(KEY, TSHARD_TIMEOUT="1.5")
    with Hosts(folder) as hosts:
        beta = hosts.run("beta", env=env)  # nobody is there yet
        check_says(beta, "nobody listens at 10.77.0.1:29400: connection refused; rank 0 has "
                   "not started")
        hosts.ip("alpha", "address", "add", ELSEWHERE, "dev", "lo")
        words = ["--hosts", ELSEWHERE + ":2,beta:2"]
        alpha, beta = (hosts.run(host, *words, env=env) for host in ("alpha", "beta"))
        check_says(alpha, "absent ranks: 2 3")
        check_says(beta, ELSEWHERE + ":29400: network is unreachable")
        check_says(hosts.run("alpha", "--hosts", "beta:2,alpha:2", env=env),
                   "cannot listen at 10.77.0.2 port 29400: Cannot assign requested address", code=1)


def a_name_of_loopback(folder):
    """Debian's installer gives a host's own name the address 127.0.1.1."""
    env = dict(KEY, TSHARD_TIMEOUT="1.5", TSHARD_HOST="alpha", TSHARD_PORT=PORT, TSHARD_SIZE="2")
    with Hosts(folder) as hosts:
        hosts.names("alpha", alpha="127.0.1.1", beta=BETA)
        check_says(hosts.run("alpha", env=KEY), "host alpha: a loopback address here, which no "
                   "other host can reach; name the first host by its address", code=1)
        alpha = hosts.gpt("alpha", dict(env, TSHARD_RANK="0"))
        beta = hosts.gpt("beta", dict(env, TSHARD_RANK="1"))
        check_says(alpha, "rank 0 listens on 127.0.1.1, where other hosts cannot reach it: set "
                   "TSHARD_HOST or TSHARD_BIND to an address of its network")
        check_says(beta, "10.77.0.1:29400: connection refused")
        alpha = hosts.gpt("alpha", dict(env, TSHARD_RANK="0", TSHARD_BIND=ALPHA))
        check_same(folder, 2, hosts.gpt("beta", dict(env, TSHARD_RANK="1")), alpha)


# ---- report ------------------------------------------------------------------


TESTS = [  # those that wait longest first
    with_only_the_port_of_rank_0_open, a_rank_that_dies_ends_both_hosts, with_a_blocked_port,
    with_different_keys, at_a_wrong_address, a_name_of_loopback, without_a_launcher,
    without_a_key, with_few_ports_open, a_key_file_and_a_host_file, two_hosts_train_as_threads_do,
    a_language_model_runs_on_two_hosts]


def unfit():
    """Why nothing can be tested here; None if it can."""
    if os.geteuid() != 0:
        return "network namespaces are root's"
    if not shutil.which("ip"):
        return "there is no ip (iproute2)"
    try:
        for space in left_behind():
            ip("netns", "delete", space)
        with tempfile.TemporaryDirectory() as folder, Hosts(folder) as hosts:
            hosts.block("alpha", "1")
            code, _, err = end(hosts.start("beta", "true"))
            if code != 0:
                return err.strip()
            if not has_launcher():
                return NO_LAUNCHER
            if not os.path.exists(GPT):
                subprocess.call(["make", "-C", TOP, "build/gpt"], timeout=100)
            code, _, err = end(hosts.start("alpha", GPT, "--backend", "tcp", "--layers", "0"))
            return err.strip() if "built without TCP" in err else None
    except subprocess.CalledProcessError as why:
        return "no network namespaces: " + why.stderr.decode().strip()


def main():
    why = unfit()
    if why:
        return tell("hosts", [(test.__name__, "SKIPPED", why) for test in TESTS])
    return run_tests("hosts", TESTS, 4)


if __name__ == "__main__":
    sys.exit(main())
